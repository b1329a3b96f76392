# SPDX-License-Identifier: Apache-2.0
# Makes programs.inc, the plugin's words, of the agent's table of programs (unicron_ctl/unicron_ctl/agent/programs.toml).
# It reads as much of TOML as is in there.
function add(list, word)
{
	if (seen[list, word]++ == 0)
		words[list] = words[list] "\t\"" word "\",\n"
}

# Into which list of C's the words of this key go; empty for none.
function list_of(section, key)
{
	if (section ~ /^launchers\./ || section == "not_replaced")
		return key == "programs" ? section : key == "modules" ? "launcher_modules" : ""
	if (section == "servers")
		return key == "programs" ? "servers" : key == "modules" ? "server_modules" : ""
	return section == "wrappers" || section == "shells" ? section : ""
}

function print_list(name)
{
	if (words[name] == "") {
		print FILENAME ": no " name > "/dev/stderr"
		failed = 1
	}
	printf "static const char *const %s[] = {\n%s};\n\n", name, words[name]
}

/^[ \t]*#/ { next }
/^\[/ {
	section = $0
	gsub(/[]["]/, "", section)
	key = ""
	next
}
/^[A-Za-z_]+ *=/ { key = $1 }
$1 == "all_nodes" && $3 == "true" { of_all_nodes[section] = 1 }
{
	list = list_of(section, key)
	count = split($0, part, "\"")
	for (i = 2; list != "" && i <= count; i += 2)
		order[++total] = list SUBSEP part[i]
}
END {
	of_all_nodes["not_replaced"] = 1
	for (i = 1; i <= total; ++i) {
		split(order[i], pair, SUBSEP)
		list = pair[1]
		if (list ~ /^launchers\./ || list == "not_replaced")
			list = list in of_all_nodes ? "starters" : "launchers"
		add(list, pair[2])
	}
	print "/* Programs of programs.toml, made by programs.awk. */"
	print_list("launchers")
	print_list("starters")
	print_list("launcher_modules")
	print_list("servers")
	print_list("server_modules")
	print_list("wrappers")
	print_list("shells")
	exit failed
}
