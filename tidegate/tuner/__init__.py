"""The tuner: searches knobs that are `auto`, proposes changes, agrees with other ranks and checks the gain."""
