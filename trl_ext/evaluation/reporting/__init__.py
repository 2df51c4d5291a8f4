"""The pieces of the report: what runs hold, and its tables, charts and page."""
