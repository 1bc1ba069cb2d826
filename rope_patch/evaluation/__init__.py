"""Measure a model on a text: functions that return result rows, and tables and charts of these rows."""
