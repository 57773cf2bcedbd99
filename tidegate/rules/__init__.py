"""Update rules as data, a module each: `adamw.py` has the rule "adamw". How a rule computes is in `kernels/NAME/`."""
