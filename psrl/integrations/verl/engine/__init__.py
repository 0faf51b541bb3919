"""The engines that share prefixes: their configuration, a mini-batch's samples, plans and run, and what they refuse."""
