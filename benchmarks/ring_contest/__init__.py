"""Members of a ring as processes of their own that train, side by side, with our exchange and with torch's DDP."""
