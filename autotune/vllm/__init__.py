"""What is known of vLLM, per version: defaults, command line, log lines, failures."""
