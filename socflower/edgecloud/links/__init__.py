"""Links whose bandwidth changes: profiles, files, generators, estimates, and shaping of real links."""
