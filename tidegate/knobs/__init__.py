"""The knobs: what an operator may change while training runs, their kinds, bounds and parser."""
