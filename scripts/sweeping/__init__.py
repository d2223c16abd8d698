"""A sweep: many models lowered with many options, one process for each, and the results compared.

Data flows one way: a file (``sweep_file``) is expanded into jobs (``jobs``); the key of a job is a
digest of all that it reads (``contents``). A job is measured (``measuring``) in a process of its
own (``job_process``), and its record is written to a folder (``records``). Tables and pages are
made of records (``fronts``, ``page``).
"""
