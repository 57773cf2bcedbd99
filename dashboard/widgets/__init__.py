"""Widgets: sections of pages. Each draws one topic and is independent of the page around it."""
