"""The one engine, for every kind of drafter and for none.

`row` is all state of one request, `open_round` a round of it that is under way, `drafting` the drafter's side of it;
`round` is what is done to rows, as plain calls, and `run` pulls one row from its prompt to its end.
"""
