"""`python examples/storage_server demo`: a storage server and clients in processes of their own, every byte compared.

The server's loops are threads of the process that shows how it goes; each client is a process. See scenario.py for the
course of it, client.py for a client's part, files.py for the files, and report.py for what is told at the end.
"""
