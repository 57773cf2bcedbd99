"""The page of results, made from the files in bench/results."""
