"""The ts/uea benchmark."""
