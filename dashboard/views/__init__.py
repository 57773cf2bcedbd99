"""The parts of the page, from top to bottom: header, phases, update, resources, control, form."""
