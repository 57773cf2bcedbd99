"""Widgets: sections of pages. Each draws one thing and knows nothing of the page around it."""
