"""What the commands do, without a terminal: options become a question, and a question is answered.

`autotune.cli` parses and prints, `autotune.api` parses and returns; both come here in between.
"""
