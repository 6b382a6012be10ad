"""Communication among processes: message keys, files of saved state, locked and temporary folders, and logging."""
