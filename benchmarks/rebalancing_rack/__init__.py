"""Members of a ring as processes of their own, each held to a part of a core, that train what they are told to."""
