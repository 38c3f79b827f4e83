"""The faults that are promised to be survived, and the tests that show it."""

from dataclasses import dataclass

JOBS = "tests/faults/test_jobs.py::"
STOPPING = "tests/faults/test_stopping.py::"
AGREEMENT = "tests/faults/test_agreement.py::"
CHECKPOINTS = "tests/faults/test_checkpoints.py::"
STORAGE = "tests/faults/test_storage.py::"
HOSTS = "tests/faults/test_hosts.py::"
ENDS = JOBS + "test_job_survives_failed_or_hung_rank"
QUICK = JOBS + "test_stop_and_three_faults_leave_weights_equal"
NAMED = JOBS + "test_a_rank_that_hangs_is_named_with_its_step"
BEARS = JOBS + "test_what_one_rank_can_bear_needs_no_restart"
BACK = HOSTS + "test_a_host_that_comes_back_joins_the_next_attempt"
WORKERS = "tests/unit/data/loading/test_loader_workers.py::"
NAMESPACES = "tests/unit/launch/test_rendezvous_namespaces.py::"
RECOVERY = "tests/unit/engine/test_run_policy.py::"
SAVING = "tests/unit/engine/test_trainer_saving.py::"
KILLS = "tests/unit/engine/test_checkpoint_kills.py::"
WATCH = "tests/unit/launch/test_watchdog.py::"
STRANGERS = "tests/unit/launch/test_rendezvous_strangers.py::"
SUPERVISION = "tests/unit/launch/test_supervisor.py::"
MEMBERS = "tests/unit/launch/test_cli_membership.py::"
OUTAGES = "tests/unit/data/loading/test_loader_outages.py::"
OUTLETS = "tests/unit/common/test_writers_failures.py::"
ANNOTATIONS = "tests/unit/data/datasets/test_annotation_cache.py::"


@dataclass(frozen=True)
class Row:
    """tests: node ids; without [...] every case counts.  Empty: `without` says why."""

    number: int
    fault: str
    promise: str
    tests: tuple[str, ...]
    without: str = ""


ROWS = (
    Row(1, "SIGKILL of one rank", "the others are stopped, the job goes on from its newest "
        "checkpoint and ends with the same weights, bit for bit",
        (ENDS + "[kill]", JOBS + "test_killed_rank_0_leaves_weights_equal",
         QUICK)),
    Row(2, "Python exception on one rank", "its traceback, with rank and step; a restart if asked "
        "for", (JOBS + "test_exception_shows_rank_and_step_at_once",
                ENDS + "[exception]", SUPERVISION
                + "test_the_first_failure_is_said_at_once")),
    Row(3, "SIGSEGV or abort in native code", "as 1", (ENDS + "[segv]", ENDS + "[abort]")),
    Row(4, "SIGTERM, SIGINT or SIGUSR1 to fleetrun or to one rank", "the step is finished, a "
        "checkpoint written, exit code 75 on all ranks; no step is lost",
        (STOPPING + "test_signal_ends_job_with_75_and_loses_no_step",
         SUPERVISION + "test_signal_to_one_process_stops_ranks_cleanly",
         "tests/unit/engine/test_trainer_stopping.py::"
         "test_stop_on_one_rank_ends_evaluation_on_all",
         "tests/integration/test_resume.py::test_interrupted_run_equals_the_whole")),
    Row(5, "SIGTERM, and SIGKILL 2 s later", "goes on from the newest checkpoint",
        (STOPPING + "test_two_seconds_of_grace_are_enough",)),
    Row(6, "a host is lost with all its ranks", "the others wait for it, with a new attempt",
        (BACK + "[second]",)),
    Row(7, "the host comes back", "it joins the next attempt when the same command is started "
        "there again", (BACK,)),
    Row(8, "the host of rank 0 is lost", "as 6 and 7", (BACK + "[first]",)),
    Row(9, "a rank is stopped (SIGSTOP) or hangs inside a collective", "it is named, the stacks of "
        "all ranks are kept, the job is restarted", (ENDS + "[stop]", NAMED + "[stop]",
         WATCH + "test_a_stopped_rank_is_named_and_stacks_are_kept",
         "tests/unit/launch/test_watchdog_hosts.py::"
         "test_a_stopped_rank_is_named_on_all_hosts")),
    Row(10, "a rank hangs and holds the interpreter's lock", "as 9",
        (ENDS + "[hang-gil]", NAMED + "[hang-gil]")),
    Row(11, "a rank skips a collective", "an error that names it, or as 9; a restart",
        (ENDS + "[skip-collective]", "tests/unit/distributed/test_shm_allreduce.py::"
         "test_ranks_in_different_collectives_report_which")),
    Row(12, "a rank is slow", "it is named, nobody is killed",
        (JOBS + "test_a_slow_rank_is_named_and_nobody_is_killed",
         "tests/unit/engine/test_monitor_stragglers.py::test_a_slow_rank_is_named_within_30_steps")),
    Row(13, "a data worker is killed", "another takes its place, the same batches are made again",
        (BEARS + "[loader-kill@rank1:step3]",
         WORKERS + "test_killed_workers_restart_with_same_stream")),
    Row(14, "a data worker hangs", "as 13, after data.worker_timeout_seconds",
        (BEARS + "[loader-hang@rank1:step3]",
         WORKERS + "test_stopped_workers_restart_with_same_stream",
         ENDS + "[hang]")),
    Row(15, "/dev/shm is too small", "it is not used at all",
        (WORKERS + "test_nothing_lies_in_dev_shm",)),
    Row(16, "a damaged or empty image", "replaced by another on every rank, told and counted; too "
        "many end the run before it starts",
        ("tests/unit/engine/test_data_blocklist.py::"
         "test_bad_images_up_to_limit_are_replaced",
         "tests/unit/engine/test_data_blocklist.py::"
         "test_two_ranks_stop_with_same_blocklist_at_limit",
         "tests/unit/data/datasets/test_annotations_fuzz.py::"
         "test_damaged_images_never_kill_or_hang_decoder")),
    Row(17, "a missing image or a bad label", "found before training, and one message",
        ("tests/unit/data/checks/test_validate.py::test_an_audit_finds_every_defect_once",
         "tests/unit/data/datasets/test_annotations_fuzz.py::"
         "test_damaged_annotations_give_issues_or_message")),
    Row(18, "a rank has no object in its batch", "the same gradients as one rank with all images",
        ("tests/integration/test_equivalence.py::"
         "test_ranks_and_micro_batches_train_like_one_rank",)),
    Row(19, "images do not divide by ranks", "each image once an epoch, as many steps on each rank",
        ("tests/unit/data/loading/test_sampler.py::test_every_image_comes_exactly_once_in_every_epoch",
         "tests/unit/data/loading/test_sampler.py::"
         "test_any_number_of_ranks_shares_same_micro_batches")),
    Row(20, "a rank runs out of memory", "all ranks take smaller micro-batches and repeat the step",
        (AGREEMENT + "test_out_of_memory_rank_splits_all_micro_batches",
         RECOVERY + "test_out_of_memory_rank_splits_steps_on_all")),
    Row(21, "the loss of one rank is not finite", "all ranks leave the step out; after several in "
        "a row back to the last snapshot with half the rate",
        (AGREEMENT + "test_a_loss_that_is_not_finite_costs_one_step",
         AGREEMENT + "test_non_finite_losses_roll_back_with_half_lr",
         RECOVERY + "test_going_back_is_resuming_for_all_that_ranks_keep")),
    Row(22, "the loss scale collapses (float16)", "it is halved at each overflow and is part of "
        "checkpoints",
        ("tests/unit/engine/test_train_step_amp.py::"
         "test_overflow_halves_loss_scale",)),
    Row(23, "the weights of a rank differ from the others'", "it is named and gets theirs; "
        "without a majority all go back to what they held at the last checkpoint",
        (AGREEMENT + "test_a_flipped_bit_is_found_and_the_rank_is_named",
         RECOVERY + "test_unequal_replicas_are_named_and_roll_back")),
    Row(24, "the disk is full at a checkpoint", "older ones but the newest and the best make room; "
        "without any, training goes on and older checkpoints are whole",
        ("tests/unit/engine/test_checkpoint_writer.py::"
         "test_a_disk_for_two_checkpoints_takes_any_number",
         "tests/unit/engine/test_checkpoint_writer.py::"
         "test_full_disk_keeps_checkpoints_until_room",
         SAVING + "test_a_full_disk_costs_a_checkpoint_and_nothing_else",
         BEARS + "[disk-full=2@rank0:step3]")),
    Row(25, "killed while a checkpoint is written", "never a torn checkpoint",
        (KILLS + "test_kill_at_any_call_leaves_whole_checkpoints",
         SAVING + "test_resume_repairs_links_lost_to_kill")),
    Row(26, "a damaged or shortened checkpoint", "the newest whole one is taken",
        (CHECKPOINTS + "test_the_newest_whole_checkpoint_is_found[flip_a_byte-5]",
         CHECKPOINTS + "test_the_newest_whole_checkpoint_is_found[cut_short-5]",
         KILLS + "test_damage_in_newest_falls_back_to_previous")),
    Row(27, "`last` is missing; two trainings in one folder", "the newest whole checkpoint is "
        "taken; the second training is refused",
        (CHECKPOINTS + "test_the_newest_whole_checkpoint_is_found[lose_the_links-9]",
         "tests/unit/common/test_files_lock.py::test_second_training_is_refused_until_first_dies")),
    Row(28, "slow storage", "checkpoints are written in the background",
        ("tests/unit/engine/test_checkpoint_writer.py::"
         "test_slow_storage_saves_newest_without_blocking",)),
    Row(29, "the network is away for up to 20 s", "no restart",
        ("tests/unit/launch/test_watchdog_hosts.py::"
         "test_a_network_away_for_20_seconds_is_survived",)),
    Row(30, "the network is divided", "both sides end, and say who is lost",
        (NAMESPACES + "test_pulled_cable_ends_both_hosts_by_name",)),
    Row(31, "a port is taken; processes of an earlier job", "a message that says so; nothing "
        "outlives a job", ("tests/unit/launch/test_cli_hosts.py::"
                           "test_a_port_that_another_program_has_is_named",
                           STOPPING + "test_nothing_outlives_a_fleetrun_that_was_killed",
                           SUPERVISION + "test_whichever_process_is_killed_nothing_is_left")),
    Row(32, "hosts differ in versions, configuration or data (annotations, the size of every "
        "image file, the content of 64 of each set)",
        "refused before the first step, with the difference",
        ("tests/unit/engine/test_preflight.py::"
         "test_each_difference_is_refused_on_every_rank",
         "tests/unit/engine/test_preflight.py::test_data_that_differ_are_named_by_image_and_column")),
    Row(33, "a clock is 10 minutes wrong", "nothing happens: waiting goes by monotonic clocks",
        (BEARS + "[clock=600@rank1:step3]", BEARS + "[clock=-600@rank0:step3]",
         "tests/unit/engine/test_time_budget.py::test_no_jump_of_the_wall_clock_ends_a_run")),
    Row(34, "resumed on another number of ranks", "the same images in the same steps",
        ("tests/unit/data/loading/test_loader_reproducible.py::"
         "test_ranks_resume_and_cache_change_no_byte",
         "tests/integration/test_resume.py::"
         "test_interrupted_run_equals_the_whole")),
    Row(35, "an evaluation fails on one rank", "training is unaffected, it is evaluated again",
        (JOBS + "test_evaluation_failure_on_one_rank_keeps_state",
         RECOVERY + "test_training_skips_evaluation_that_fails_twice")),
    Row(36, "a log cannot be written", "training goes on and says so once",
        (BEARS + "[log-full=3@rank0:step3]",
         OUTLETS + "test_visualdl_may_fail_in_any_call_and_in_any_way",
         OUTLETS + "test_full_disk_tears_no_line_warns_per_writer",
         OUTLETS + "test_read_only_disk_fails_start_not_running_job",
         OUTLETS + "test_training_needs_neither_visualdl_nor_matplotlib")),
    Row(37, "power is lost", "goes on from the newest checkpoint on disk, whose steps are in "
        "metrics.jsonl",
        (STOPPING + "test_power_loss_resumes_from_newest_checkpoint",
         "tests/unit/engine/test_state_resume.py::"
         "test_records_of_a_checkpoint_are_on_disk_before_it",
         "tests/unit/engine/test_state_resume.py::test_steps_that_metrics_lack_are_said")),
    Row(38, "the same step kills a rank again and again", "after two crashes its batches are left "
        "out once",
        (AGREEMENT + "test_a_batch_that_kills_a_rank_twice_is_left_out",
         RECOVERY + "test_skipped_step_keeps_weights")),
    Row(39, "an image of which the decoder dies; pictures at the end that crash or hang",
        "its still picture is read; a warning, and the training stays complete",
        ("tests/faults/test_fuzz.py::test_changed_files_are_read_or_refused[images]",
         "tests/unit/runtime/test_decoder.py::test_broken_animation_shows_its_still_picture",
         "tests/integration/test_finished_run.py::test_deadly_images_and_pictures_cost_no_run",
         "tests/unit/common/test_child.py::test_work_apart_logs_here_and_may_die")),
    Row(40, "a pipe, or a link to /dev/zero, in the place of an image, weights, annotations or a "
        "configuration", "it is no file: a bad image, else one message; nobody waits for it",
        ("tests/unit/data/checks/test_images.py::test_pipes_and_devices_are_named_at_once",
         "tests/unit/data/test_image_bombs.py::test_what_is_no_file_is_not_waited_for",
         "tests/unit/models/test_weights.py::test_pipes_and_devices_are_no_weight_files",
         "tests/unit/data/datasets/test_annotations_strangers.py::"
         "test_pipes_and_devices_are_no_annotations",
         "tests/unit/config/test_yaml_bombs.py::"
         "test_pipes_devices_and_huge_files_are_no_config")),
    Row(41, "the storage of the images is away for a while (unmounted, ESTALE, EIO, ETIMEDOUT)",
        "its samples are waited for, with one warning, up to half of distributed.timeout_seconds; "
        "then a checkpoint and a restart, which waits for annotations and weights too",
        (STORAGE + "test_images_away_for_8_seconds_cost_no_step",
         STORAGE + "test_images_away_for_longer_cost_one_restart",
         BEARS + "[storage-error=2@rank1:step3]", BEARS + "[storage-blocks=8@rank1:step3]",
         OUTAGES + "test_folder_away_for_a_while_changes_no_batch",
         OUTAGES + "test_errors_of_a_network_disk_are_waited_out",
         OUTAGES + "test_empty_mount_point_is_an_outage_too",
         OUTAGES + "test_cache_whose_disk_is_away_changes_nothing",
         "tests/unit/engine/test_trainer_outages.py::"
         "test_work_is_saved_before_images_end_a_run",
         "tests/unit/engine/test_trainer_outages.py::test_a_stop_does_not_wait_for_storage",
         "tests/unit/engine/test_trainer_outages.py::"
         "test_a_stop_amid_an_evaluation_does_not_wait_for_storage",
         OUTAGES + "test_storage_that_comes_and_goes_is_one_outage",
         "tests/unit/engine/test_state_resume.py::"
         "test_checkpoints_that_are_away_are_waited_for",
         "tests/unit/engine/test_preflight.py::test_a_restart_waits_for_what_was_read_before",
         "tests/unit/data/checks/test_before_training.py::"
         "test_check_of_a_restart_waits_for_its_images")),
    Row(42, "images, annotations, configurations, weights, checkpoints, requests and lines of "
        "fleetrun that no honest program writes",
        "read, or refused with a code: no crash, no hang, no code of theirs runs",
        ("tests/faults/test_fuzz.py::test_changed_files_are_read_or_refused",)),
    Row(43, "the data check takes longer than the ranks wait for one another",
        "they wait while it gets on",
        (STORAGE + "test_check_longer_than_the_timeout_ends_no_job",
         "tests/unit/distributed/test_store_barriers.py::"
         "test_rank_that_shows_life_is_waited_for_and_hung_one_not")),
    Row(44, "kept annotations are damaged, cut short, stale, half written, or cannot be written",
        "they are read again, and kept where there is room; one line says so",
        ("tests/unit/common/test_keyed_cache.py::test_damaged_entry_is_absent_and_deleted",
         "tests/unit/common/test_keyed_cache.py::test_full_disk_is_said_once_and_costs_nothing",
         *(ANNOTATIONS + name for name in (
            "test_damaged_cache_is_read_again",
            "test_changed_content_is_read_again_even_with_its_old_times",
            "test_one_changed_file_of_many_is_noticed",
            "test_cache_that_cannot_be_written_is_done_without",
            "test_ranks_of_a_host_map_what_one_has_read")))),
    Row(45, "a blocked or lost terminal (Ctrl-S, a sleeping laptop); a disk of output_dir "
        "that answers nothing for a while", "no step waits; lines of a terminal may be missing, "
        "which is said; a signal still ends the run with 75",
        (BEARS + "[disk-blocks=8@rank0:step3]", BEARS + "[terminal-blocks=8@rank0:step3]",
         JOBS + "test_a_terminal_that_is_gone_costs_lines_only",
         "tests/unit/runtime/test_writer_thread.py::"
         "test_a_terminal_that_takes_nothing_stops_neither_steps_nor_the_end",
         "tests/unit/runtime/test_writer_thread.py::test_a_frozen_disk_holds_up_no_step",
         "tests/unit/runtime/test_writer_thread.py::"
         "test_a_disk_that_stays_frozen_is_told_at_the_end",
         "tests/unit/launch/test_console.py::test_a_blocked_terminal_leaves_the_exit_code")),
    Row(46, "strangers flood the start port with greetings, garbage or silence", "the hosts meet, "
        "with a token or without; with one nobody else joins or ends the run",
        (STRANGERS + "test_a_flood_of_strangers_prevents_no_start",
         STRANGERS + "test_a_host_without_the_token_is_refused",
         STRANGERS + "test_a_line_that_is_not_as_it_was_sent_ends_the_connection")),
    Row(47, "a host is lost with --min_hosts, and comes back", "the others go on from the newest "
        "checkpoint, and take it in at a later one; each step is made once, with the same images "
        "and micro-batches; the first host is waited for; of a divided network its side goes on",
        (HOSTS + "test_two_of_three_hosts_go_on_and_take_the_third_in_again",
         MEMBERS + "test_hosts_go_on_without_one_and_take_it_in_again",
         MEMBERS + "test_two_hosts_lost_together_are_both_named",
         MEMBERS + "test_a_lost_hub_is_waited_for",
         MEMBERS + "test_a_hub_that_stays_away_ends_the_others_with_one_code",
         MEMBERS + "test_of_a_divided_network_the_side_of_the_hub_goes_on")),
)  # fmt: skip
