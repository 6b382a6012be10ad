"""Pipelines that continue when devices are lost: backups, and a member that forms its pipeline again."""
