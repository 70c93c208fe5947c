"""Everything about other people's code: the contract of a plugin, injection, discovery, launching."""
