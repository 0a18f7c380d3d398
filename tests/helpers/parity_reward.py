"""A reward of the user's own, named as parity_reward:parity: an untrained model never solves
Countdown, but its texts have odd lengths."""


def parity(completion, answer, **row):
    return float(len(completion) % 2)
