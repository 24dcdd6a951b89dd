"""What a plan starts from: models, machines, what these reach of their printed rates, and layouts."""
