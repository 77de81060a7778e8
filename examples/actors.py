"""Reinforcement learning: actors play on workers, the coordinator learns from their episodes.

    python examples/actors.py --workers 2 --updates 30

The recipe is the vanilla policy gradient of OpenAI's Spinning Up: play episodes, weigh each action
by the reward that followed it, take a step. The game is a corridor: walk left or right, the reward
is at the right end. Actors are functions that a coordinator schedules; they read the policy from
the parameter servers, and an actor that dies is replaced by another one.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distribax as dx

LENGTH, MAX_MOVES, EPISODES = 6, 20, 8


def play(logits: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Plays some episodes with a policy; returns places, moves and the rewards that followed."""
    rng = np.random.default_rng(seed)
    places, moves, returns = [], [], []
    for _ in range(EPISODES):
        place, walked = 0, 0
        while place < LENGTH - 1 and walked < MAX_MOVES:
            right = 1 / (1 + np.exp(logits[place, 0] - logits[place, 1]))
            move = int(rng.random() < right)
            places.append(place)
            moves.append(move)
            place = max(0, place + 2 * move - 1)
            walked += 1
        reward = float(place == LENGTH - 1)
        # A reward that comes later counts less.
        returns += [reward * 0.9 ** (walked - 1 - step) for step in range(walked)]
    pad = EPISODES * MAX_MOVES - len(places)
    return {
        "place": np.pad(np.array(places, np.int32), (0, pad)),
        "move": np.pad(np.array(moves, np.int32), (0, pad)),
        "return": np.pad(np.array(returns, np.float32), (0, pad)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=30)
    options = parser.parse_args()

    strategy = dx.ParameterServerStrategy(num_workers=options.workers, num_ps=1)
    coordinator = dx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        policy = dx.Variable(jnp.zeros((LENGTH, 2)), name="policy")
        optimizer = dx.Optimizer(optax.adam(0.1))

    def act(seed: int) -> dict[str, np.ndarray]:
        """Runs on a worker: reads the newest policy, and plays."""
        return play(policy.numpy(), seed)

    @dx.function
    def learn(episodes: dict[str, jax.Array]) -> jax.Array:
        """Runs on a worker, too: takes a step from the episodes of all actors."""

        def loss_fn() -> jax.Array:
            logs = jax.nn.log_softmax(policy.value())[episodes["place"], episodes["move"]]
            return -jnp.mean(logs * episodes["return"])

        loss, gradient = dx.value_and_grad(loss_fn, policy)()
        optimizer.apply_gradients([(gradient, policy)])
        return loss

    rewards = []
    for update in range(options.updates):
        seeds = [update * options.workers + actor for actor in range(options.workers)]
        played = coordinator.fetch([coordinator.schedule(act, args=(seed,)) for seed in seeds])
        episodes = {key: np.stack([p[key] for p in played]) for key in played[0]}
        coordinator.schedule(learn, args=(episodes,))
        coordinator.join()
        rewards.append(float(np.mean(episodes["return"])))
    print(f"reward {np.mean(rewards[:3]):.3f} at first, {np.mean(rewards[-3:]):.3f} at the end")
    right = np.asarray(jax.nn.softmax(policy.numpy()))[: LENGTH - 1, 1]
    print(f"goes right with probability {right.min():.2f} or more")
    strategy.close()


if __name__ == "__main__":
    main()
