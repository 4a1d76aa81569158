"""Best-subset selection across sites from sums, with the result of the pooled fit.

Read `fedbestsubset` (the federated algorithm), `subset_state` (what the server keeps),
`best_subset` (one step of the search), `subset_model` (the quadratic model that it searches) and
`certificate` (the proof of optimality). The folder imports the simulator only.
"""
