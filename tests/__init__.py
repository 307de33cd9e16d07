"""The tests: which folder has which, in what order to read them, and how to write one for a new verb.

Read first `native/support.h` with `native/test_cq_resize.c` (the software device in C, without Python), then
`core/test_handles.py` (its Python handles), `data_path/test_operations.py` (awaited requests),
`manager/test_lifecycle.py` (public resources) and `connections/test_messages.py` (what stands on them). The others are
like one of these.

====================== ===============================================================================================
folder                 what it tests
====================== ===============================================================================================
``native``             the software device, the allocators and the data path's C parts: C programs, one for a subject
``abi``                our declarations of libibverbs and librdmacm, against the installed headers
``core``               the compiled handles: arguments, ownership, lifetime, affinity, errors; a model of the device
``data_path``          work requests that are awaited: operations, batches, failures, places in queues, messages
``data_path_endings``  work requests that are cancelled, closed, interrupted, or asked for by other threads
``fabric``             the same between two devices and two processes: frames that are lost, peers that lie or stop
``manager``            public resources: devices, domains, regions, pools of buffers, their owners and their ends
``sharing``            protection domains that processes share
``connections``        connections, handshakes, listeners, servers, grants
``pool``               pools of workers: threads and processes
``storage``            the storage server of the examples
``services``           ASGI servers and their workers
``cli``                the command ``aioverbs``
``sources``            the sentences of the documents that the project implements, one by one
``testing``            the pytest plugin that the project has for its users
``packaging``          what is installed: names, errors, README, documentation
``checks``             the scripts that check the sources, and tests of them
``rdma``               what RDMA devices alone have: `nox -s rdma` runs them, and many of the others, on soft-RoCE
``verbs_matrix``       each verb on the software device and on soft-RoCE, and why they differ where they do
``costs``              system calls, doorbells, turns of the loop and allocations of the fast paths, counted
``bench``              benchmarks: `nox -s bench`
``fuzz``               programs that feed parsers and devices nonsense: `nox -s fuzz`
``soak``               minutes of random use: `nox -s soak`
``flaky``              tests that fail by chance: `nox -s flaky`
``mutation``           planted faults, and whether tests find them: `nox -s mutate`
====================== ===============================================================================================

C has what the device does: states, statuses, errnos, events, faults, calls of allocators. Python has what the library
adds: conversion and checks of arguments, owners, references, awaiting, exceptions. A behaviour is tested on one side.

What every test has stands in `conftest.py`: a ledger of open objects that has to be empty at the end, and the event
loops. `ways.py` decides with which loop and execution a test runs. `capabilities.py` says what a test needs of its
device, `devices.py` opens it, `pace.py` has patience with slow machines.

A new verb has a test

1. in C, of what it does: ``native/test_VERB.c``, or the program of its object. List it in ``native/support_verbs.c``:
   then it takes part in the tests that fail every verb.
2. of its handle: arguments in ``core/test_arguments.py``, failures in the scene of ``core/test_fault_exhaustive.py``.
3. of its public method: in ``data_path`` or ``manager``, marked `every_way` if the loop or the execution can change
   what happens; and its caller from a wrong loop in ``manager/affinity_checks.py``.
4. on soft-RoCE: rows in ``verbs_matrix``.

A test names a behaviour, orders events by their cause and not by sleeping, and fails when the behaviour breaks; try
that once, by breaking it. What a test measures is counted, never timed.
"""
