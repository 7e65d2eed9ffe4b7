"""How wide the next round is: `policy` is what a policy is, `table` the policies by name."""
