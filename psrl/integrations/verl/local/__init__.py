"""veRL's training worker in this process, without Ray: for ``psrl replay``, offline training and tests."""
