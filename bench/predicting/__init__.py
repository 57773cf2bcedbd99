"""Parts of bench/prediction.py: a training, configurations of it, errors of predictions, and their plot."""
