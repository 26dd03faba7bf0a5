"""The only place that starts processes or opens sockets."""
