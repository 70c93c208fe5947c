"""What the plugins for mmengine's hosts share. Importing it changes nothing."""
