"""Simulated cards for comparing search strategies: their truth, and an engine that launches on it.

truth.py       bytes and tokens per second of one launch, by formulas that the product does not use
catalogue.py   the landscapes: cards, models, targets, the published space of each
simulated.py   the truth as an engine: noise, refusals, deaths, what a log would say
rivals.py      strategies that people use today
recorded.py    landscapes recorded from real vLLM
"""
