"""Sections that pages are put together from: each draws one thing, and knows nothing of the page around it."""
