"""Which proposals stand, and what is handed out in the places of the others.

`rule` is what a rule is, `table` the rules by name, `exact` the one in force unless another is asked for; `walks` lead
from a block's logits to a round's tokens.
"""
