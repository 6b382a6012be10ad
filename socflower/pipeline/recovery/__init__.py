"""Pipelines that go on when devices are lost: light re-planning, backups, and a member that re-forms its pipeline."""
