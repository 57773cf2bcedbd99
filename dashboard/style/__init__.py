"""Style: colours, HTML and its escaping, numbers with units."""
