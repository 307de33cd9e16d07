"""`python examples/storage_server demo`: a storage server, client processes, and a comparison of every byte.

The server's worker loops are threads of the process that shows the progress; each client is a process of its own.
scenario.py has the sequence of steps, client.py the clients' part, files.py the files, and report.py the final report.
"""
