"""Measuring: functions of a model and a text, rows of what they found, tables and charts of rows."""
