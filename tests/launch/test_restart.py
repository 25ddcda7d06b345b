from launch.restart import Backoff, GiveUp, RestartPolicy, StartAgain


def waits(policy: RestartPolicy, deaths: int) -> list[float]:
    verdicts = []
    for n in range(deaths):
        verdict = policy.died(1, now=float(n))
        assert isinstance(verdict, StartAgain) and verdict.at == n + verdict.wait_s
        verdicts.append(verdict.wait_s)
    return verdicts


def test_backoff_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy()
    policy.joined(0.0)
    assert waits(policy, 8) == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_healthy_minute_resets_and_less_does_not() -> None:
    policy = RestartPolicy()
    policy.joined(0.0)
    waits(policy, 3)
    policy.joined(100.0)
    assert policy.died(-9, now=159.0) == StartAgain(at=167.0, wait_s=8.0)
    policy.joined(200.0)
    assert policy.died(-9, now=260.0) == StartAgain(at=261.0, wait_s=1.0)


def test_startup_error_ends_it_only_before_it_ever_joined() -> None:
    assert RestartPolicy().died(3, now=0.0) == GiveUp()
    policy = RestartPolicy()
    policy.joined(0.0)
    assert isinstance(policy.died(3, now=1.0), StartAgain)
    assert isinstance(policy.died(3, now=2.0), StartAgain)


def test_other_deaths_before_joining_are_tried_a_few_times() -> None:
    policy = RestartPolicy(Backoff(tries_before_joining=3))
    assert isinstance(policy.died(1, now=0.0), StartAgain)
    assert isinstance(policy.died(-11, now=5.0), StartAgain)
    assert policy.died(1, now=9.0) == GiveUp()
