"""Style: colours, HTML snippets with escaping, and numbers with units."""
