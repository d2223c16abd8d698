"""A sweep: many models lowered with many options, one process for each, and the results compared.

Data flows one way: a file says what to run (``sweep_file``), which makes jobs (``jobs``) with keys
that digest all that they read (``contents``). A job is measured (``measuring``) in a process of its
own (``job_process``), and becomes a record in a folder (``records``). Tables and pages are made of
records (``fronts``, ``table``, ``page``).
"""
