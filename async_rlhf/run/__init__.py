"""One run, from its configuration to its end. `async_rlhf.preparation` begins it; `async_rlhf.api` and the command call that.

what a reader looks for                  where
the configuration and its keys           config, loading, config_keys, watching, scoring, own_code; shipped
what is refused before anything starts   config_checks, learner_checks: settings; checks/preflight: all else
which process runs on which host         hosts/: placement, connections, node_files; `async_rlhf.launch` starts them
what each process does                   processes/: roles, learner, evaluation, tracking, agreement
who starts again what ended, and when    supervision/: supervisor, child, evaluator, hub_notifier
what the supervisor watches beside       supervision/: resources, promise, hooks (events and their delivery)
trackers, one file each                  tracking/
the run directory                        run_dir, run_files, run_data, manifest; live (changes while it goes on, forks)
what a person sees                       display/: console, notebook, terminal
"""
