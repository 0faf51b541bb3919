"""Systems and sampling strategies side by side, as tables, plots and a page."""
