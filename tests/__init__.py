"""Tests of aioverbs: the folders, an order for reading them, and how to test a new verb.

Begin with `native/support.h` and `native/test_cq_resize.c` (the software device in C, without Python), then read
`core/test_handles.py` (its Python handles), `data_path/test_operations.py` (awaited requests),
`manager/test_lifecycle.py` (public resources) and `connections/test_messages.py` (connections). The other tests
resemble one of these.

====================== ===============================================================================================
folder                 tested
====================== ===============================================================================================
``native``             the software device, the allocators and the data path's C parts: C programs, one for each subject
``abi``                our declarations of libibverbs and librdmacm, against the installed headers
``core``               the compiled handles: arguments, ownership, lifetime, affinity, errors; a model of the device
``data_path``          awaited work requests: operations, batches, failures, full queues, messages
``data_path_endings``  work requests that are cancelled, closed, interrupted, or posted by other threads
``fabric``             work requests between two devices and two processes: lost frames, hostile and stopped peers
``manager``            public resources: devices, domains, regions, buffer pools, owners, closing
``sharing``            protection domains shared between processes
``connections``        connections, handshakes, listeners, servers, grants
``pool``               pools of workers: threads and processes
``storage``            the storage server of the examples
``services``           ASGI servers and their workers
``distributed``        the comm backend for Dask
``cli``                the command ``aioverbs``
``sources``            requirements of the documents that the project implements, sentence by sentence
``testing``            the pytest plugin for the project's users
``packaging``          the installed package: names, errors, README, documentation
``checks``             scripts that check the sources, and their tests
``rdma``               features of RDMA devices only: `nox -s rdma` runs these and many other tests, on soft-RoCE
``verbs_matrix``       each verb on the software device and on soft-RoCE, and the reasons for differences
``aarch64``            a system for arm64, and what its emulator lacks: `nox -s aarch64`
``costs``              counts of system calls, doorbells, iterations of the loop and allocations on the fast paths
``bench``              benchmarks: `nox -s bench`
``fuzz``               fuzzing of parsers and devices: `nox -s fuzz`
``soak``               minutes of random use: `nox -s soak`
``flaky``              search for flaky tests: `nox -s flaky`
``mutation``           mutations of the code, which tests must detect: `nox -s mutate`
====================== ===============================================================================================

Tests in C cover the behaviour of the device: states, statuses, errnos, events, faults, calls of allocators. Tests in
Python cover the library's additions: conversion and checks of arguments, owners, references, awaiting, exceptions. Each
behaviour is tested on one side only.

`conftest.py` provides the fixtures of every test: a ledger of open objects that must be empty at the end, and the event
loops. `ways.py` selects the loop and the execution of a test. `capabilities.py` declares the capabilities that a test
needs of its device, `devices.py` opens the device, and `pace.py` scales time limits for slow machines.

A new verb needs tests

1. of its behaviour, in C: ``native/test_VERB.c``, or the program of its object. List the verb in
   ``native/support_verbs.c``, so that the tests that make every verb fail include it.
2. of its handle: arguments in ``core/test_arguments.py``, failures in the scene of ``core/test_fault_exhaustive.py``.
3. of its public method: in ``data_path`` or ``manager``, marked `every_way` if the result may depend on the loop or the
   execution; and a call from a wrong loop in ``manager/affinity_checks.py``.
4. on soft-RoCE: rows in ``verbs_matrix``.

A test names a behaviour, waits for events instead of sleeping, and fails when the behaviour breaks: break it once to
see that. Costs are counted, never timed.
"""
