"""Shared by the plugins for libraries on mmengine. Importing it changes nothing."""
