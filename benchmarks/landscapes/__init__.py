"""Landscapes for comparing search strategies: what may be launched, and what it is worth.

ground.py      what every landscape is
truth.py       bytes and tokens per second of a simulated launch, by formulas that the product does not use
simulated.py   that truth as an engine: noise, refusals, deaths, what a log would say
recorded.py    the grid recorded from real vLLM
catalogue.py   the landscapes: cards, models, targets, the published space of each
rivals.py      strategies that people use today
"""
