"""PPO with a recurrent actor: the environment, advantages by a scan from behind, epochs and updates in one `jit`."""

import jax
import jax.numpy as jnp
import optax

ENVS, LENGTH, WIDTH, ACTIONS = 32, 16, 32, 4


def init(key):
    shapes = {"in": (ACTIONS + 1, WIDTH), "gates": (2 * WIDTH, 2 * WIDTH), "new": (2 * WIDTH, WIDTH)}
    shapes |= {"actor": (WIDTH, ACTIONS), "critic": (WIDTH, 1)}
    keys = jax.random.split(key, len(shapes))
    return {k: jax.random.normal(x, s) * s[0] ** -0.5 for x, (k, s) in zip(keys, shapes.items(), strict=True)}


def network(params, carry, inputs):
    """Returns the next carry, the logits and the value; the carry starts anew where an episode does."""
    observation, is_first = inputs
    carry = jnp.where(is_first[:, None], 0.0, carry)
    x = jnp.tanh(observation @ params["in"])
    reset, update = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, carry], -1) @ params["gates"]), 2, -1)
    new = jnp.tanh(jnp.concatenate([x, reset * carry], -1) @ params["new"])
    carry = update * carry + (1 - update) * new
    return carry, (carry @ params["actor"], (carry @ params["critic"])[:, 0])


def rollout(params, key):
    """Plays: the first observation of an episode of 4 shows the action that its last step rewards."""
    goals = jax.random.randint(key, (LENGTH // 4, ENVS), 0, ACTIONS)

    def step(carry, inputs):
        t, key = inputs
        goal, is_first = goals[t // 4], jnp.full(ENVS, t % 4 == 0)
        shown = jax.nn.one_hot(goal, ACTIONS) * is_first[:, None]
        observation = jnp.concatenate([shown, jnp.full((ENVS, 1), t % 4 / 3)], -1)
        carry, (logits, value) = network(params, carry, (observation, is_first))
        action = jax.random.categorical(key, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        reward = jnp.where((t % 4 == 3) & (action == goal), 1.0, 0.0)
        return carry, (observation, is_first, action, log_prob, value, reward)

    keys = jax.random.split(key, LENGTH)
    return jax.lax.scan(step, jnp.zeros((ENVS, WIDTH)), (jnp.arange(LENGTH), keys))[1]


def advantages_of(is_first, values, rewards):
    ends = jnp.concatenate([is_first[1:], jnp.ones((1, ENVS), bool)])
    following = jnp.concatenate([values[1:], jnp.zeros((1, ENVS))])

    def step(advantage, inputs):
        end, value, next_value, reward = inputs
        delta = reward + jnp.where(end, 0.0, 0.99 * next_value) - value
        advantage = delta + jnp.where(end, 0.0, 0.99 * 0.95 * advantage)
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros(ENVS), (ends, values, following, rewards), reverse=True)[1]


def loss_fn(params, batch, advantages):
    observations, is_first, actions, old_log_probs, old_values, _ = batch
    carry = jnp.zeros((ENVS, WIDTH))
    _, (logits, values) = jax.lax.scan(lambda c, x: network(params, c, x), carry, (observations, is_first))
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, actions[..., None], -1)[..., 0] - old_log_probs)
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy = -jnp.mean(jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled))
    value = jnp.mean((values - old_values - advantages) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, -1))
    return policy + 0.5 * value - 0.01 * entropy


def main(steps):
    """Returns one less the reward of each update, at most 1 an episode."""
    params, tx = init(jax.random.key(0)), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))

    @jax.jit
    def step(params, opt_state, key):
        batch = rollout(params, key)
        advantages = advantages_of(batch[1], batch[4], batch[5])

        def epoch(carry, _):
            params, opt_state = carry
            grads = jax.grad(loss_fn)(params, batch, advantages)
            updates, opt_state = tx.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), None, length=4)
        return params, opt_state, 1 - 4 * jnp.mean(batch[5])

    opt_state, losses = tx.init(params), []
    for key in jax.random.split(jax.random.key(1), steps):
        params, opt_state, loss = step(params, opt_state, key)
        losses.append(loss)
    return losses
