"""The tables, figures and theorems of the paper on FedSLR."""
