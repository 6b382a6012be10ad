"""Papers beside our values: tables and figures as numbers, each with its place, and our computation of them."""
