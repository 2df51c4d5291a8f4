"""The parts of the report: run data, tables, charts and page."""
