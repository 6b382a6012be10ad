"""Scenarios: a question in a TOML file, run on an engine, and its claim checked."""
