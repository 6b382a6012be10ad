"""`report.html`: pages, tables and plots of results."""
