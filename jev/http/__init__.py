"""HTTP/1.1 as the worker and the gateway serve it: what is between a socket and a WSGI application, on waitress."""
