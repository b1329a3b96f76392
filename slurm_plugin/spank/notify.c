/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "config.h"
#include "msgpack.h"
#include "notify.h"

#define LOOKUP_NANOSECONDS 500000000L

static struct {
	struct sockaddr_storage address;
	socklen_t length;
} controllers[UNICRON_CONTROLLER_ADDRESSES];
static size_t known;     /* of them; 0: nowhere to send to */

/* All addresses of the name: nobody can say which of them leads to the controller. */
static void remember(const struct addrinfo *found)
{
	for (; found != NULL && known < UNICRON_CONTROLLER_ADDRESSES; found = found->ai_next) {
		if (found->ai_addrlen > sizeof(controllers[known].address))
			continue;
		memcpy(&controllers[known].address, found->ai_addr, found->ai_addrlen);
		controllers[known++].length = found->ai_addrlen;
	}
}

/* All that a look-up in another thread may still touch after we stopped waiting for it. */
struct lookup {
	struct gaicb request;
	struct addrinfo hints;
	char host[UNICRON_HOST_MAX];
	char port[8];
};

/* getaddrinfo has no time limit of its own and a dead name server would hold up the step, hence the asynchronous form. */
static void look_up_name(const char *host, const char *port)
{
	const struct timespec limit = { .tv_nsec = LOOKUP_NANOSECONDS };
	struct lookup *lookup = calloc(1, sizeof(*lookup));
	struct gaicb *list[1];

	if (lookup == NULL)
		return;
	snprintf(lookup->host, sizeof(lookup->host), "%s", host);
	snprintf(lookup->port, sizeof(lookup->port), "%s", port);
	lookup->hints.ai_socktype = SOCK_DGRAM;
	lookup->request.ar_name = lookup->host;
	lookup->request.ar_service = lookup->port;
	lookup->request.ar_request = &lookup->hints;
	list[0] = &lookup->request;

	if (getaddrinfo_a(GAI_NOWAIT, list, 1, NULL) != 0)
		goto done;
	gai_suspend((const struct gaicb *const *) list, 1, &limit);
	if (gai_error(&lookup->request) == EAI_INPROGRESS && gai_cancel(&lookup->request) != EAI_CANCELED) {
		slurm_verbose("unicron: couldn't look up %s in time: the controller gets no hints from this step", host);
		return;         /* the thread still uses the memory: it has to stay */
	}
	if (gai_error(&lookup->request) == 0 && lookup->request.ar_result != NULL)
		remember(lookup->request.ar_result);

done:
	if (lookup->request.ar_result != NULL)
		freeaddrinfo(lookup->request.ar_result);
	free(lookup);
}

static void add_controller(const char *address)
{
	const struct addrinfo numeric = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_DGRAM };
	struct addrinfo *found = NULL;
	char host[UNICRON_HOST_MAX];
	char port[8];
	unsigned number;

	if (config_split_address(address, host, &number) < 0)
		return;
	snprintf(port, sizeof(port), "%u", number);
	if (getaddrinfo(host, port, &numeric, &found) == 0) {
		remember(found);
		freeaddrinfo(found);
	} else {
		look_up_name(host, port);
	}
}

void notify_set_controller(const char *address)
{
	char one[UNICRON_ONE_ADDRESS_MAX];

	known = 0;
	for (unsigned i = 0; address != NULL && i < UNICRON_CONTROLLERS; ++i)
		if (config_next_address(&address, one) == 0)
			add_controller(one);
}

/*
 * The node's name in a step. SLURMD_NODENAME cannot be trusted outside of the task itself (a step of a batch script
 * inherits that of the batch host), so it is this step's node list, taken at this node's place.
 */
static void step_node_name(spank_t sp, char name[UNICRON_NODE_MAX])
{
	char nodes[8192];
	uint32_t place = 0;
	char *host = NULL;

	if (spank_get_item(sp, S_JOB_NODEID, &place) != ESPANK_SUCCESS ||
	    (spank_getenv(sp, "SLURM_STEP_NODELIST", nodes, sizeof(nodes)) != ESPANK_SUCCESS &&
	     spank_getenv(sp, "SLURM_NODELIST", nodes, sizeof(nodes)) != ESPANK_SUCCESS))
		return;
	/* hostlist_t is a pointer in some releases, and what it points to in others. */
	__auto_type list = slurm_hostlist_create(nodes);
	if (list == NULL)
		return;
	for (uint32_t i = 0; i <= place; ++i) {
		free(host);
		host = slurm_hostlist_shift(list);
		if (host == NULL)
			break;
	}
	if (host != NULL)
		snprintf(name, UNICRON_NODE_MAX, "%s", host);
	free(host);
	slurm_hostlist_destroy(list);
}

/* A whole number from the step's environment; false when it is not there. */
static bool step_number(spank_t sp, const char *name, int64_t *value)
{
	char text[24];
	char *end;

	if (spank_getenv(sp, name, text, sizeof(text)) != ESPANK_SUCCESS)
		return (false);
	*value = strtoll(text, &end, 10);
	return (end != text && *end == '\0');
}

void notice_identify(spank_t sp, struct notice *notice)
{
	uint32_t id = 0;
	int64_t job, array_job, element;

	spank_get_item(sp, S_JOB_ID, &id);
	notice->slurm_id = id;
	notice->element = 0;
	job = id;
	notice->node[0] = '\0';

	if (step_number(sp, "SLURM_ARRAY_JOB_ID", &array_job) && step_number(sp, "SLURM_ARRAY_TASK_ID", &element)) {
		job = array_job;
		notice->element = element;
	}
	step_node_name(sp, notice->node);
	if (notice->node[0] == '\0' && gethostname(notice->node, sizeof(notice->node) - 1) == 0)
		notice->node[strcspn(notice->node, ".")] = '\0';
	snprintf(notice->job, sizeof(notice->job), "%lld", (long long) job);
}

size_t notice_encode(const struct notice *notice, void *data, size_t size)
{
	struct msgpack out;

	msgpack_init(&out, data, size);
	msgpack_map(&out, 7);
	msgpack_text(&out, "v");
	msgpack_int(&out, UNICRON_HINT_NUMBER);
	msgpack_text(&out, "kind");
	msgpack_text(&out, notice->kind);
	msgpack_text(&out, "job");
	msgpack_text(&out, notice->job);
	msgpack_text(&out, "element");
	msgpack_int(&out, notice->element);
	msgpack_text(&out, "slurm_id");
	msgpack_int(&out, notice->slurm_id);
	msgpack_text(&out, "node");
	msgpack_text(&out, notice->node);
	msgpack_text(&out, "status");
	msgpack_int(&out, notice->status);
	return (out.overflow ? 0 : out.used);
}

void notify_send(const struct notice *notice)
{
	unsigned char data[512];
	size_t length = notice_encode(notice, data, sizeof(data));
	int fd;

	for (size_t i = 0; i < known && length != 0; ++i) {
		fd = socket(controllers[i].address.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		if (fd < 0)
			continue;
		if (sendto(fd, data, length, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *) &controllers[i].address,
			   controllers[i].length) < 0)
			slurm_verbose("unicron: couldn't send %s to the controller: %s", notice->kind, strerror(errno));
		close(fd);
	}
}
